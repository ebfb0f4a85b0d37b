"""Parts that several families are made of."""
