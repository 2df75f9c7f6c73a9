"""The objects that every cluster has from the start: the name server's Service, and volumes for claims."""

from __future__ import annotations

from typing import Any

from scripts.testbed.cluster.layout import CONTROL, Layout


def basics(layout: Layout) -> dict[str, dict[str, Any]]:
    """The objects, by the path of the API at which they are made."""
    return {
        "/api/v1/namespaces/kube-system/services": _dns_service(layout),
        "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices": _dns_endpoints(layout),
        "/apis/storage.k8s.io/v1/storageclasses": _storage_class(),
    }


def _dns_service(layout: Layout) -> dict[str, Any]:
    ports = [
        {"name": name, "port": 53, "protocol": protocol} for name, protocol in (("dns", "UDP"), ("dns-tcp", "TCP"))
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}},
        "spec": {"clusterIP": layout.dns_service, "ports": ports},
    }


def _dns_endpoints(layout: Layout) -> dict[str, Any]:
    ports = [
        {"name": name, "port": 53, "protocol": protocol} for name, protocol in (("dns", "UDP"), ("dns-tcp", "TCP"))
    ]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "kube-dns",
            "namespace": "kube-system",
            "labels": {"kubernetes.io/service-name": "kube-dns"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [layout.address(CONTROL)], "conditions": {"ready": True}}],
        "ports": ports,
    }


def _storage_class() -> dict[str, Any]:
    # Made by the controller manager, in a folder of the cluster that both nodes see.
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "standard", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": "kubernetes.io/host-path",
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "Immediate",
    }
