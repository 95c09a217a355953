"""Addresses, interfaces and connections. Depends on the handshake, but neither on ranks nor on stores."""
