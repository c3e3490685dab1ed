"""Learn from the labels of the inbox, when a person or a job asks for it."""
