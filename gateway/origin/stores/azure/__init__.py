"""Azure Blob as a store: blobs of a container are objects of a bucket."""
