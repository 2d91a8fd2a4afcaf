import pytest

from streamsrv.auth import certificate_names


@pytest.mark.parametrize(
    ("common", "alternative", "expected"),
    [
        ([b"alice"], [], "alice"),
        ([b"alice"], [b"alice"], "alice"),
        ([], [b"spiffe://example/alice"], "spiffe://example/alice"),
        ([b"client"], [b"alice.example", b"10.0.0.1"], "client, alice.example, 10.0.0.1"),
        ([b"a, b"], [], "a\\, b"),
        ([b"a"], [b"b"], "a, b"),
        ([b"a\\"], [b"b"], "a\\\\, b"),
        ([b"\xff"], [], "\\\\xff"),
        ([b""], [], ""),
        ([], [], ""),
    ],
)
def test_a_certificates_names_are_joined_so_that_no_two_certificates_of_other_names_look_the_same(
    common: list[bytes], alternative: list[bytes], expected: str
) -> None:
    context = {"x509_common_name": common, "x509_subject_alternative_name": alternative}
    assert certificate_names({key: values for key, values in context.items() if values}) == expected
