"""Our own HTTP/1.1 towards the origin, for requests without a body: what nearly all of them are.

    request line and headers → a pooled connection → the answer's head → its body, received where it is wanted

aiohttp, which does everything else, costs twice as much as all the rest of a small object's way through the gateway.
"""
