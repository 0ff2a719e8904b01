"""`forebay doctor`: checks of the configuration, the origin, the disk, the limits, clients and a running gateway."""
