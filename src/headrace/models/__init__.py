"""Model families, one folder each. Families never import each other."""
