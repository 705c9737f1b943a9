"""The two halves of `adapt-model`: asking a provider's model, and training on what it told."""
