"""Define variants of the product's network, as subclasses of its blocks."""
