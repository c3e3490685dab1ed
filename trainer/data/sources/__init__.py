"""Find labelled images in the forms that people have: folders, archives, tables, parquet."""
