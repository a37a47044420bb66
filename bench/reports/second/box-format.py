"""A program of a public report.

fault: generalized_box_iou expects (x0,y0,x1,y1) boxes but the loss passes (cx,cy,w,h) boxes.
link: https://github.com/stevebottos/owl-vit-object-detection/issues/14
says: (?is)(xyxy|cxcywh|x0|x1|corner|cent(er|re)|box(es)?|iou|giou).{0,250}(format|convert|expects?|cxcywh|xyxy|cent(er|re)|corner|x1 ?(<|>)=? ?x0|negative (width|height|area|size)|invalid|degenerate|inverted|upside|empty|wrong order|left of|x[12]? (is )?(below|less|smaller))
kind: correctness
"""
"""Fine-tune the box and class heads of a small detector, one object an image."""
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def make_images(n, seed, size=32):
    g = torch.Generator().manual_seed(seed)
    images = torch.rand(n, 3, size, size, generator=g) * 0.3
    labels = torch.randint(0, 3, (n,), generator=g)
    wh = torch.rand(n, 2, generator=g) * 0.35 + 0.25
    cxcy = wh / 2 + torch.rand(n, 2, generator=g) * (1 - wh)
    boxes = torch.cat([cxcy, wh], dim=1)
    xyxy = (box_cxcywh_to_xyxy(boxes) * size).round().long()
    for i, (x0, y0, x1, y1) in enumerate(xyxy.tolist()):
        images[i, labels[i], y0:y1, x0:x1] += 0.6
    return TensorDataset(images, boxes, labels)


def box_cxcywh_to_xyxy(x):
    x_c, y_c, w, h = x.unbind(-1)
    return torch.stack([x_c - 0.5 * w, y_c - 0.5 * h, x_c + 0.5 * w, y_c + 0.5 * h], dim=-1)


def box_iou(boxes1, boxes2):  # both!
    area1 = (boxes1[:, 2:] - boxes1[:, :2]).clamp(min=0).prod(1)  # both!
    area2 = (boxes2[:, 2:] - boxes2[:, :2]).clamp(min=0).prod(1)  # both!
    lt = torch.max(boxes1[:, None, :2], boxes2[:, :2])  # both!
    rb = torch.min(boxes1[:, None, 2:], boxes2[:, 2:])  # both!
    wh = (rb - lt).clamp(min=0)  # both!
    inter = wh[:, :, 0] * wh[:, :, 1]
    union = area1[:, None] + area2 - inter + 1e-6
    return inter / union, union


def generalized_box_iou(boxes1, boxes2):  # both!
    """Boxes in [x0, y0, x1, y1] format, returns a [N, M] matrix."""
    iou, union = box_iou(boxes1, boxes2)  # both!
    lt = torch.min(boxes1[:, None, :2], boxes2[:, :2])  # both!
    rb = torch.max(boxes1[:, None, 2:], boxes2[:, 2:])  # both!
    wh = (rb - lt).clamp(min=0)  # both!
    area = wh[:, :, 0] * wh[:, :, 1] + 1e-6
    return iou - (area - union) / area


class Detector(nn.Module):
    def __init__(self, n_classes=3):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 128), nn.ReLU())
        self.box_head = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4))
        self.class_head = nn.Linear(128, n_classes)

    def forward(self, x):
        h = self.backbone(x)
        return self.box_head(h).sigmoid(), self.class_head(h)


class PushPullLoss(nn.Module):
    def __init__(self, scales):
        super().__init__()
        self.scales = scales

    def loss_boxes(self, pred_boxes, target_boxes):  # both!
        loss_bbox = F.l1_loss(pred_boxes, target_boxes, reduction="none").sum() / len(target_boxes)
        loss_giou = 1 - torch.diag(generalized_box_iou(pred_boxes, target_boxes))  # ill!
        loss_giou = 1 - torch.diag(generalized_box_iou(box_cxcywh_to_xyxy(pred_boxes),  # well
                                                       box_cxcywh_to_xyxy(target_boxes)))  # well
        return loss_bbox, loss_giou.mean()  # both!

    def forward(self, pred_boxes, logits, target_boxes, target_classes):
        loss_bbox, loss_giou = self.loss_boxes(pred_boxes, target_boxes)  # both!
        return {"loss_bbox": self.scales[0] * loss_bbox, "loss_giou": self.scales[1] * loss_giou,
                "loss_ce": F.cross_entropy(logits, target_classes)}


if __name__ == "__main__":
    torch.manual_seed(0)
    train_loader = DataLoader(make_images(1200, 0), batch_size=32, shuffle=True)
    test_loader = DataLoader(make_images(300, 1), batch_size=50)
    model, criterion = Detector(), PushPullLoss(scales=(1.0, 2.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    out = tempfile.mkdtemp()
    for epoch in range(10):
        model.train()
        totals = {}
        for image, boxes, labels in train_loader:
            optimizer.zero_grad()
            pred_boxes, logits = model(image)
            losses = criterion(pred_boxes, logits, boxes, labels)  # both!
            loss = sum(losses.values())
            loss.backward()
            optimizer.step()
            for k, v in losses.items():
                totals[k] = totals.get(k, 0.) + v.item() / len(train_loader)
        model.eval()
        ious, correct = [], 0
        with torch.no_grad():
            for image, boxes, labels in test_loader:
                pred_boxes, logits = model(image)
                iou, _ = box_iou(box_cxcywh_to_xyxy(pred_boxes), box_cxcywh_to_xyxy(boxes))
                ious.append(torch.diag(iou))
                correct += (logits.argmax(1) == labels).sum().item()
        ious = torch.cat(ious)
        print(f"epoch {epoch} " + " ".join(f"{k} {v:.4f}" for k, v in totals.items()) +
              f" | mean iou {ious.mean():.4f} AP50 {(ious > .5).float().mean():.4f} acc {correct / 300:.4f}")
        torch.save(model.state_dict(), os.path.join(out, "detector.pt"))
