"""Read folders of images, check and split them, choose exemplars, change images at random."""
