"""HDFS by its REST interface, read-only."""
