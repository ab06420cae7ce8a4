"""What a client does in a round, and what it keeps."""
