"""Keep objects: create if absent, read, list, delete; on a disk or in S3."""
