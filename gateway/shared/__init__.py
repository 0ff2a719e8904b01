"""Memory that all processes of a gateway share."""
