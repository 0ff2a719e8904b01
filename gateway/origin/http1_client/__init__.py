"""HTTP/1.1 towards the origin: everything that the gateway asks of it.

request line, headers, body → a pooled connection → the answer's head → its body, received where it is wanted
"""
