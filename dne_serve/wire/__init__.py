"""Read requests off connections within limits on time, bytes and clients."""
