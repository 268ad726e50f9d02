"""The price of an iteration: as one value, its shape over K, and the tables that it is read from."""
