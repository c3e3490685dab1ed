"""Define the network as pure modules. They read no files and know no store."""
