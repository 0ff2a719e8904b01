"""What the load tests share: origin, peers, gateway, clients, statistics, tables and pictures.

Everything listens on 127.0.0.1 only, is started by a test and stopped by it, and every wait is bounded.
"""
