"""What happens between a tagged graph and the store."""
