"""Active control: compares ways to pace the checks of many clients, by simulation and on a broker of known speed.

The model is a broker with many clients under active control, after A. S. Vdovenko et al.
"""
