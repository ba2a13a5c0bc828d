"""1,797 handwritten digits, carried inside the package so that they are there offline and without
scikit-learn.

The records are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C.
Kaynak, UCI Machine Learning Repository, 1998, doi:10.24432/C50P49, CC BY 4.0), the set that
scikit-learn ships: 64 grey values of 0 to 16, then the digit, a byte each.
"""
