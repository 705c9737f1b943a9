"""What a user could do without the federation: the same question asked of each site alone and of pooled cells."""
