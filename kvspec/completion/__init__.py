"""The ledgers of producer and consumer: when blocks are free, and when data is valid."""
