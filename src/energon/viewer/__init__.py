"""The dataset browser of `energon view`: pages made by this process, for the browser beside it.

Whatever is shown is data of strangers: text is escaped, names are numbers in addresses, parts
never run. Nothing is read before someone looks, so ten samples cost the same as ten million.
"""
