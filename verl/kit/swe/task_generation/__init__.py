"""Makes tasks from tested packages, and checks them before anybody trains on them."""
