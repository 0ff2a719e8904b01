"""Clients that race on few keys, and the model that says which answers may be right.

`contents` describe themselves, `history` knows who may see what, `world` judges answers by both, `reading` and
`writing` are the steps, `playing` has clients take them.
"""
