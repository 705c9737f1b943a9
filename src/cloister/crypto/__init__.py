"""Cryptography that computes and never communicates; every file can be checked against its reference alone.

entropy      secrets from the operating system
prg          AES-256-CTR as a stream of NumPy arrays, and the samplers of lattice cryptography
agreement    X25519, HKDF, Ed25519, ChaCha20-Poly1305
sharing      Shamir's secret sharing
fixedpoint   real numbers in Z_{2^64}
"""
