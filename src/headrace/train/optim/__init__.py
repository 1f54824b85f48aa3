"""The update rules of the reports, which parameter each of them owns, and one optimizer over all of them."""
