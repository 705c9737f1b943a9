"""Models that compute and never communicate."""
