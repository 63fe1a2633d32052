"""What transports over HTTP share: requests, reading events, retries, failures, redaction."""
