"""Any JSON value that a payload may be, for hypothesis."""

from hypothesis import strategies as st

_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _text
)

json_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_text, inner, max_size=4),
    max_leaves=15,
)
