"""The bytes of what was acknowledged: a staged file for each PutObject and UploadPart, written, sealed and opened."""
