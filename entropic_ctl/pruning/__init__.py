"""Entropic pruning of paged attention: the budget laws, page selection and the certificate of what was lost."""
