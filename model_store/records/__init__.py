"""Define the sealed JSON records of a store: manifests, channel records, marks, signatures."""
