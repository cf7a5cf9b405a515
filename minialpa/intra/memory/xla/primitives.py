"""What XLA does with each primitive, as sets of names: the facts that lowering.py and fusion.py decide by."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Mark or move a value and compute nothing. XLA drops them before all else.
MARKERS = _names("device_put minialpa_gradient minialpa_per_micro_batch name sharding_constraint stop_gradient")
#: The same bytes in another shape or type.
VIEWS = _names("bitcast_convert_type copy expand_dims random_unwrap random_wrap reshape squeeze")
#: Made without reading an array.
FILLS = _names("axis_index empty iota partition_id")

REDUCTIONS = _names("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_xor")
_EXPENSIVE_ELEMENTWISE = _names(
    """acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1 igamma lgamma
    log log1p log2 logistic pow rem rsqrt sin sinh sqrt tan tanh"""
)
#: Never computed twice.
EXPENSIVE = _EXPENSIVE_ELEMENTWISE | REDUCTIONS | {"gather"}
#: May be computed inside a sum that reads them.
JOINS_SUM = _names(
    "abs add convert_element_type exp integer_pow max min mul neg one_minus_square polynomial square sub"
)
#: Each element of the result needs one element of each operand.
ELEMENTWISE = (
    _EXPENSIVE_ELEMENTWISE
    | JOINS_SUM
    | _names(
        """add_any and ceil clamp clz complex conj eq eq_to floor ge gt imag is_finite le le_to lt lt_to mulhi ne
        nextafter not or population_count real reduce_precision round select_n shift_left shift_right_arithmetic
        shift_right_logical sign xor"""
    )
)
#: Compiled to loops over the elements of their results, which may be fused.
LOOPS = ELEMENTWISE | EXPENSIVE | _names("concatenate dynamic_slice dynamic_update_slice pad rev slice split")
#: What GPUs take to compute an element, as bytes of memory that they move in that time; all else is next to nothing.
WORK_BYTES = dict.fromkeys(_EXPENSIVE_ELEMENTWISE, 10.0) | dict.fromkeys(
    ("div", "exp", "exp2", "expm1", "log", "log1p", "log2", "logistic", "rem", "rsqrt", "sqrt"), 2.0
)
