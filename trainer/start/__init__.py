"""Make the network that a task begins with: of a preset, of a pre-trained file, or the parent's."""
