"""A job's side of local reads, `forebay.local` and `forebay.filesystem`: it imports nothing of the gateway's.

The gateway itself is the package `gateway`.
"""
