"""Addresses, interfaces and connections. Knows the handshake, and nothing of ranks or stores."""
