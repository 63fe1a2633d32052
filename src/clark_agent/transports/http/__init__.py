"""Shared parts of the HTTP transports: requests, reading events, retries, failures, redaction."""
