"""Messages and stubs of the API, generated from proto/weightsync/v1 when the package is built."""
