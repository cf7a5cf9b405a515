"""What XLA does with each primitive, as sets of names: the facts that lowering.py decides by."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Mark or move a value and compute nothing. XLA drops them before all else.
MARKERS = _names("device_put minialpa_gradient minialpa_per_micro_batch name sharding_constraint stop_gradient")
#: The same bytes in another shape or type.
VIEWS = _names("bitcast_convert_type copy expand_dims random_unwrap random_wrap reshape squeeze")
#: Made without reading an array.
FILLS = _names("axis_index empty iota partition_id")

REDUCTIONS = _names("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")
_EXPENSIVE_ELEMENTWISE = _names(
    """acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1 igamma lgamma
    log log1p log2 logistic pow rem rsqrt sin sinh sqrt tan tanh"""
)
#: Each element of the result needs one element of each operand.
ELEMENTWISE = _EXPENSIVE_ELEMENTWISE | _names(
    """abs add add_any and ceil clamp clz complex conj convert_element_type eq eq_to floor ge gt imag integer_pow
    is_finite le le_to lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or polynomial population_count
    real reduce_precision round select_n shift_left shift_right_arithmetic shift_right_logical sign square sub xor"""
)
#: Compiled to loops over the elements of their results, which may be fused.
LOOPS = ELEMENTWISE | REDUCTIONS | _names("concatenate dynamic_slice dynamic_update_slice gather pad rev slice split")
#: What GPUs take to compute an element, as bytes of memory that they move in that time; all else is next to nothing.
WORK_BYTES = dict.fromkeys(_EXPENSIVE_ELEMENTWISE, 10.0) | dict.fromkeys(
    ("div", "exp", "exp2", "expm1", "log", "log1p", "log2", "logistic", "rem", "rsqrt", "sqrt"), 2.0
)
