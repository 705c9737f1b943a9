"""Cryptography that computes and never communicates; every file can be checked against its reference alone.

entropy              secrets from the operating system
prg                  AES-256-CTR as a stream of NumPy arrays, and the samplers of lattice cryptography
agreement            X25519, HKDF, Ed25519, ChaCha20-Poly1305
sharing              Shamir's secret sharing
fixedpoint           real numbers in Z_{2^64}
paillier             ciphertexts that can be added
oblivious_transfer   base transfers and their extension
replicated           three-party sharing: rings, bit planes, permutations
lattice, kernels     rings that are safe, residues, NTT and noise
ckks, lattice               real vectors under encryption, and the rings they live in
packed_product       products of matrices, one of them under BFV
owner_ckks           an encoder on ciphertexts of its user's key, on a CPU or a graphics card
"""
