"""The nouns: frozen values that cross floors. Standard library only; nothing here knows torch, Ray, HTTP or text."""
