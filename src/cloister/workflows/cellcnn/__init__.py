"""Parts of `train-cellcnn` and `predict-cellcnn`: what an opened model selects, and how good it is."""
