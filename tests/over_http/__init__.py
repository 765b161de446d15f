"""HTTP over an engine that tests answer for, or script: real sockets, no model."""
