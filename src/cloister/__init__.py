"""Cloister: analyse single-cell data together while every cell stays at home."""
