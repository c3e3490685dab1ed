"""Read the files of pre-trained vision transformers: by tensor names, as one kind of network."""
