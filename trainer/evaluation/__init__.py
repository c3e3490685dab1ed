"""Judge a version on images that nobody trained on, and write down the verdict."""
