__version__ = "1.0.0rc1"
WIRE_VERSION = "0.1.0"  # of messages and run ids; raised only when parties of two releases could not compute together
