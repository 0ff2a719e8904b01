"""What `forebay doctor` looks at: the configuration, the origin, the disk, the limits, clients, a running gateway."""
