"""Say what would help a version most: more images, labels to look at, copies to take out."""
