"""One table: all sides, models, cases and numbers of clients, in rounds that can be interrupted and continued."""
